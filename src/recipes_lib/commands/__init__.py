"""The ``recipes`` subcommands, each imported when it runs."""
