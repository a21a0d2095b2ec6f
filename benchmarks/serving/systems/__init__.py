"""Systems that are compared, behind one interface."""
