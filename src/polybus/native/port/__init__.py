"""The verbs of the native port: durable topics for programs, by batches, from any thread."""
