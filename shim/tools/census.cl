/* Where does a wave run? Each group of one wave writes the hardware's own numbers of its place, then stays long enough
 * for the next group to be sent elsewhere. OpenCL C, because that needs neither headers nor device libraries: clang alone
 * builds it for any GPU it knows.
 *
 * Sources. Fields: the comment above __smid() in HIP's public header amd_detail/amd_device_functions.h (5.7.1 and 7.2.4), which says
 * for gfx90a SE_ID 15:13, for gfx942 14:13 and XCC_ID 3:0, for gfx11 WGP_ID 13:10, SA_ID 16, SE_ID 20:18. Numbers: LLVM's SIDefines.h (ID_HW_ID
 * 4, ID_HW_ID1 23, also on gfx12; ID_XCC_ID 20). That gfx12 kept gfx11's fields is assumed: nothing public was found that says it. */
#if defined(__gfx1100__) || defined(__gfx1201__)
#define PLACE 23 /* HW_ID1: simd 9:8, wgp 13:10, shader array 16, engine 20:18 */
#else
#define PLACE 4 /* HW_ID: cu 11:8, shader array 12, engine from 13: two bits on gfx942, three on gfx90a */
#endif
#define WHOLE(number) ((number) | 31 << 11) /* register, offset 0, 32 bits */

kernel void census(global uint *places, uint rounds) {
    uint place = __builtin_amdgcn_s_getreg(WHOLE(PLACE)), xcc = 0;
#if defined(__gfx942__)
    xcc = __builtin_amdgcn_s_getreg(20 | 3 << 11); /* XCC_ID, four bits */
#endif
    uint group = __builtin_amdgcn_workgroup_id_x();
    for (uint i = 0; i < rounds; i++) __builtin_amdgcn_s_sleep(8);
    places[group * 2] = place;
    places[group * 2 + 1] = xcc | 0x80000000u; /* never what was there before: it ran */
}
