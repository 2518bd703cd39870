/* A kernel that does nothing, and a variable that a module takes VRAM for when it is loaded. */
__global char filler[64 << 20];
__kernel void nothing(void) {}
