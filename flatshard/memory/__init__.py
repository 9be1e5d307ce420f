"""Bytes on the host: mapped files, page pool, disk, buffers."""
