"""What an accumulated gradient becomes: its norm, the clip and the update (`update`)."""
