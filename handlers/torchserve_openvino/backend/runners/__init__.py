"""How a compiled model runs its calls: guarded, frozen, or with the backend that proves best."""
