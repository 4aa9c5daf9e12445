"""What the bytes are: dtypes, planes, groups, layouts, shards and keys. Pure values, no I/O."""
