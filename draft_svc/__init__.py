"""A draft replica: any method that proposes tokens, behind one stream of steps."""
