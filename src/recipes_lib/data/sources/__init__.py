"""Any dataset layout to canonical rows: local files, Hub datasets, mixtures, splits."""
