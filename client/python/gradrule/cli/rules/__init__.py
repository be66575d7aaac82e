"""`gradrule rules`: the registry of rules, looked at, tried, drawn and checked."""
