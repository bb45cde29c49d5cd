"""What other clients notice while retention trims a large topic."""
