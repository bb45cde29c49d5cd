"""The benchmark of the store: durable commits beside the disk and its peers, reads into Arrow."""
