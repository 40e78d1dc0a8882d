"""What each command is asked to do: one frozen model a command."""
