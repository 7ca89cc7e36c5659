"""The cache as its users see it: start with `api.HiCache`."""
