"""Loads and faults for a whole system: servers, engines and a store as processes, and clients that judge what comes."""
