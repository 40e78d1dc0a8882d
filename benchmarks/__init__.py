"""Scripts that print the numbers quoted in the documentation."""
