"""What every floor may use: mesh axes, errors, strict configuration, names, units."""
