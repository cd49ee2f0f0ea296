# SPDX-License-Identifier: Apache-2.0
"""The part that depends on Megatron's training.

hooks wraps its functions (installation keeps which, compat knows where each release has them), those of the model by
model, those of its loop by loop and log. refusals names what cannot work; term computes SimReg on what tokens has read.
"""
