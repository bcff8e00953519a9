"""Models, batches and comparisons that several test files share."""
