// What stands between the two products of an expert.
//
// Defines:
//   ACTIVATION=f     f is silu, gelu, gelu_tanh, relu or relu2; silu is a times the sigmoid of ALPHA a
//   GATED            what is made is f(gate) * (value + PLUS); with LIMIT, values are between -LIMIT and it, and gates
//                    not above it

#pragma once

__device__ __forceinline__ float silu(float a, float alpha) { return a / (1.0f + __expf(-alpha * a)); }
__device__ __forceinline__ float gelu(float a, float) { return 0.5f * a * (1.0f + erff(a * 0.7071067811865476f)); }
__device__ __forceinline__ float gelu_tanh(float a, float) {
  return 0.5f * a * (1.0f + tanhf(0.7978845608028654f * (a + 0.044715f * a * a * a)));
}
__device__ __forceinline__ float relu(float a, float) { return a < 0.0f ? 0.0f : a; }    // which NaN passes
__device__ __forceinline__ float relu2(float a, float) { return a < 0.0f ? 0.0f : a * a; }

__device__ __forceinline__ float activated(float gate, float value) {
#ifdef LIMIT
  constexpr float limit = LIMIT;
  gate = gate > limit ? limit : gate;
  value = value > limit ? limit : value < -limit ? -limit : value;
#endif
#ifdef ACTIVATION
  gate = ACTIVATION(gate, (float)ALPHA);
#endif
#ifdef GATED
  gate *= value + (float)PLUS;
#endif
  return gate;
}
