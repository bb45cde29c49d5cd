"""How bytes reach sessions and leave them. Sessions are known by protocol only."""
