"""Commands that write a model folder: export of a checkpoint, merged adapter, student initialised from a teacher."""
