"""The native port: durable produce and reads over Arrow Flight, and who feels it."""
