"""How a stock model's weights come from its file while it runs: built without them, paged block by
block, patched on arrival."""
