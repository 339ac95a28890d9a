// A fence for the assembler's scheduler, of the loops where other work must stand between products.
#pragma once

// Nothing is scheduled across this. Left alone, the assembler puts what is between the products wherever it finds
// registers: copies and loads of fragments in bunches, all sums of parts last, where neither hides the other.
// positive: something the assembler cannot know to be so; place: another number each time, or it finds out that it has
// asked before.
__device__ inline void keep_order(int positive, int place) {
    asm volatile("{ .reg .pred p; setp.eq.s32 p, %0, %1; @p exit; }" ::"r"(positive), "r"(-1 - place));
}
