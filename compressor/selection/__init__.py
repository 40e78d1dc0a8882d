"""Which heads to drop: gates learned by gradient, searches by evaluation."""
