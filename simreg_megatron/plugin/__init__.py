# SPDX-License-Identifier: Apache-2.0
"""The part that depends on Megatron: the flags, the functions of Megatron that are wrapped, the log, AdaGC.

In the order of a run:

    hooks             install() and uninstall(): which function gets which wrapper
    installation      what is wrapped in this process, and with which settings
    compat            where each release of Megatron keeps these functions
    arguments         the --simreg-* and --adagc* flags
    refusals          settings, flags and models under which SimReg would be wrong or silent
    loop_hooks        around Megatron's loop: set-up, the step's number, the log, the resume
    other_loops       the same for loops that are not Megatron's, called through simreg_megatron.loop
    before_training   for every loop: what is on; whole_graph (CUDA graphs), form_trial (the fastest kernels)
    model_hooks       around the model: its final hidden states and labels meet here
    regularizer       from these to the term, and to Megatron's loss
    tokens            which positions count
    inner             states inside the decoder, and stages, where these lie on earlier pipeline stages
    bypass            a model that does not call the wrapped functions is an error
    gradient_returns  a loss that brings no gradient back is an error
    writers           TensorBoard and the timers
    clip              AdaGC
    bridge            Megatron Bridge
"""
