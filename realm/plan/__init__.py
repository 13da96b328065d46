"""`realm plan`: memory and time of a preset's stages on given hardware, computed before anything is bought or started."""
