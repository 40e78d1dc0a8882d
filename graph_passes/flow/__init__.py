"""How the axes of a graph carry units (heads) from operator to operator, and the edits that remove them."""
