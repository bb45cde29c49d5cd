"""The servers that are measured, ours and others, each behind the same small contract."""
