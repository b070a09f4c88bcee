"""A kernel as PTX, for tests of what loads and launches: it takes no compiler."""

from __future__ import annotations

ADD = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry add(.param .u64 memory, .param .u32 number) {
  .reg .b64 %address, %offset;
  .reg .b32 %value, %number, %place;
  ld.param.u64 %address, [memory];
  ld.param.u32 %number, [number];
  cvta.to.global.u64 %address, %address;
  mov.u32 %place, %ctaid.x;
  mul.wide.u32 %offset, %place, 4;
  add.s64 %address, %address, %offset;
  ld.global.u32 %value, [%address];
  add.s32 %value, %value, %number;
  st.global.u32 [%address], %value;
  ret;
}
"""
"""`add`: each program adds a number to one int32 of a memory."""
