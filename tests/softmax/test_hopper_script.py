"""How `tests/hopper.py` reads what ptxas made."""

import hopper

SASS = """
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_1:
        /*0010*/                   UIADD3 UR4, UR4, 0x1, URZ ;
.L_x_2:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2 ;
        /*0030*/              @!P0 BRA `(.L_x_4) ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R8, gdesc[UR4], RZ, !UPT ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R8, gdesc[UR8], R8, gsb0 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/                   FFMA R8, R8, 0.5, -R9 ;
        /*0080*/                   MUFU.EX2 R8, R8 ;
.L_x_3:
        /*0090*/               @P1 BRA `(.L_x_2) ;
        /*00a0*/               @P2 BRA `(.L_x_1) ;
        /*00b0*/                   EXIT ;
.L_x_4:
        /*00c0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2 ;
        /*00d0*/              @!P0 BRA `(.L_x_4) ;
        /*00e0*/                   BRA `(.L_x_3) ;
"""


def test_the_innermost_loop_that_multiplies():
    (loop,) = hopper.loops(SASS)
    assert [instruction.split()[0] for instruction in loop] == [
        "SYNCS.PHASECHK.TRANS64.TRYWAIT", "BRA", "HGMMA.64x64x16.F32.BF16", "HGMMA.64x64x16.F32.BF16",
        "WARPGROUP.DEPBAR.LE", "FFMA", "MUFU.EX2", "BRA",
    ]  # fmt: skip
    assert hopper.in_order(loop) == "SYNCS.PHASECHK BRA HGMMA*2 WARPGROUP.DEPBAR MUFU BRA"
