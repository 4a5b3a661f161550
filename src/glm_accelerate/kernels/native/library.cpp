// All operators as one unit: torch's headers, which take most of the time, are read once.

#include "adamw.cpp"
#include "attention.cpp"
#include "lora.cpp"
#include "loss.cpp"
#include "norm.cpp"
#include "product.cpp"
#include "swiglu.cpp"
