"""The global state of a run as it travels.

structures  what is saved, as a structure and its tensors
published   a published state as bytes
retention   which states, means and offers are kept
"""
