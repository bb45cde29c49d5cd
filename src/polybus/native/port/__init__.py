"""The server side of the native port: actions, streams and reads of durable topics."""
