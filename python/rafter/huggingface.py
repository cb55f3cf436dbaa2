def patch(m): pass
def unpatch(m): pass
