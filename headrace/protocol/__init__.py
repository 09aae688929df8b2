"""Wire version 1: messages, their codec and their limits. Pure: no sockets, no clock."""
