"""The log under the store: records that are durable before they are applied."""
