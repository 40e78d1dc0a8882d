"""Studies: many runs of one model side by side, cell by cell, with one table and the papers' figures at the end."""
