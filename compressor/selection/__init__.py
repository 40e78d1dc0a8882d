"""Selection of the heads to keep: gates learned by gradient, searches by evaluation."""
