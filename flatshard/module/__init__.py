"""A plain module made a sharded one."""
