"""What the package as a whole keeps to: imports, sizes."""
