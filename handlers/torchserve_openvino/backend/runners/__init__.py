"""How a compiled model runs its calls: guarded, frozen, or by whichever backend proves best."""
