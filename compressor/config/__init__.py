"""The configurations of the commands, as frozen pydantic models. Command-line flags are made from their fields."""
