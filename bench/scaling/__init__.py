"""What grows: the cost of one step at sizes of 1, 10 and 100 times."""
