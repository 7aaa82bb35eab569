// The one source of every module of this map.
