"""Scripts that print the numbers which the documents quote."""
