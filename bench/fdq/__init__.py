"""FDQ: producing, consuming in a group, and how long a message takes from end to end."""
