"""The ``recipes`` subcommands, each imported only when it is asked for."""
