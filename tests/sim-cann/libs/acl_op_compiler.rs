//! libacl_op_compiler.so: operators by type name, which compute nothing here, and the compile options that
//! torch_npu asks at its start.

#![allow(non_snake_case)]

use sim_cann::acl::OK;
use sim_cann::ffi::{Address, Text, put_text, text};
use sim_cann::trace;

const OPTION_ROOM: usize = 16;

#[unsafe(no_mangle)]
extern "C" fn aclGetCompileoptSize(_option: i32) -> usize {
    OPTION_ROOM
}

#[unsafe(no_mangle)]
extern "C" fn aclGetCompileopt(_option: i32, value: Address, room: usize) -> i32 {
    put_text(value, room, "disable");
    OK
}

#[unsafe(no_mangle)]
extern "C" fn aclopCreateAttr() -> Box<u64> {
    Box::new(0)
}

#[unsafe(no_mangle)]
extern "C" fn aclopDestroyAttr(attributes: Option<Box<u64>>) {
    drop(attributes);
}

#[unsafe(no_mangle)]
extern "C" fn aclopCompileAndExecute(
    kind: Text,
    _input_count: i32,
    _input_descs: Address,
    _inputs: Address,
    _output_count: i32,
    _output_descs: Address,
    _outputs: Address,
    _attributes: Address,
    _engine: i32,
    _compile: i32,
    _path: Text,
    stream: Address,
) -> i32 {
    trace::enter("aclopCompileAndExecute").text("name", &text(kind)).num("stream", stream).done(OK)
}

#[unsafe(no_mangle)]
extern "C" fn aclopCompileAndExecuteV2(
    kind: Text,
    _input_count: i32,
    _input_descs: Address,
    _inputs: Address,
    _output_count: i32,
    _output_descs: Address,
    _outputs: Address,
    _attributes: Address,
    _engine: i32,
    _compile: i32,
    _path: Text,
    stream: Address,
) -> i32 {
    trace::enter("aclopCompileAndExecuteV2").text("name", &text(kind)).num("stream", stream).done(OK)
}
