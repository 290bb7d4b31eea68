//! The columns of stacks, a frame a line, innermost first, as msMemScope writes them: `file(line): function` of
//! Python's, and of native ones what glibc's `backtrace_symbols` gives, `file(function+distance) [address]`.

use std::fmt::Write;
use std::sync::Arc;

use crate::model::{Frame, Name, NativeFrame, NativeStack, Origin, Stack, Whose};
use crate::stacks::{Origins, demangled};
use crate::text::sanitize;

/// Stands before the frames of the main thread, where that waited for the thread that allocated.
const VIA: &str = "via main:";

/// Joins the frames of a stack that is to stay on one line.
const FLAT: &str = " <- ";

/// Stands behind the native frames of a stack of which the outermost are missing.
const CUT: &str = "...";

/// Frames read of a stack at most.
const FRAMES_MOST: usize = 1024;

/// How stacks are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StackStyle {
    #[default]
    Lines,
    /// On one line, for tools that take a line for a row.
    Flat,
}

/// Appends a stack. Its lines go through `clean` one by one.
pub(super) fn write(out: &mut String, stack: &Stack, style: StackStyle, clean: impl Fn(&mut String, &str)) {
    if stack.frames().is_empty() {
        return;
    }
    let separator = separator(style);
    if stack.whose() == Whose::Via {
        out.push_str(VIA);
    }
    let mut line = String::new();
    for (n, frame) in stack.frames().iter().enumerate() {
        if n > 0 || stack.whose() == Whose::Via {
            out.push_str(separator);
        }
        line.clear();
        // Writing to a string can not fail.
        let _ = write!(line, "{}({}): {}", frame.file, frame.line.unwrap_or(0), frame.function);
        clean(out, &line);
    }
}

/// Appends the native functions of a stack; the last line is [`CUT`] where others are missing.
pub(super) fn write_native(
    out: &mut String,
    stack: &Stack,
    style: StackStyle,
    clean: impl Fn(&mut String, &str),
) {
    let Some(native) = stack.native() else { return };
    let mut line = String::new();
    // What was inlined has no frame of its own.
    for (n, frame) in native.frames().iter().filter(|frame| !frame.inlined).enumerate() {
        if n > 0 {
            out.push_str(separator(style));
        }
        line.clear();
        let NativeFrame { module, symbol, offset, address, .. } = frame;
        // Writing to a string can not fail.
        let _ = write!(line, "{module}({symbol}+{offset:#x}) [{address:#x}]");
        clean(out, &line);
    }
    if native.is_cut() {
        out.push_str(separator(style));
        out.push_str(CUT);
    }
}

fn separator(style: StackStyle) -> &'static str {
    match style {
        StackStyle::Lines => "\n",
        StackStyle::Flat => FLAT,
    }
}

/// Reads the stacks of both columns, of msMemScope as well; `None` where there are none.
pub(super) fn parse(python: &str, native: &str) -> Option<Stack> {
    let python = parse_python(python);
    match parse_native(native) {
        Some(native) => Some(Stack::with_native(python.as_ref(), Arc::new(native))),
        None => python,
    }
}

fn parse_native(text: &str) -> Option<NativeStack> {
    let lines = || text.split('\n').flat_map(|line| line.split(FLAT)).take(FRAMES_MOST);
    let origins = Origins::default();
    let frames = lines().filter_map(native_frame).map(|frame| {
        let origin = origins.of_code(&frame.module);
        (frame, origin)
    });
    NativeStack::new(frames.collect(), lines().any(|line| line == CUT))
}

fn native_frame(line: &str) -> Option<NativeFrame> {
    let hexadecimal = |digits: &str| u64::from_str_radix(digits.strip_prefix("0x")?, 16).ok();
    let (place, address) = line.strip_suffix(']')?.rsplit_once(" [")?;
    let (module, symbol) = place.strip_suffix(')')?.rsplit_once('(')?;
    let (symbol, offset) = symbol.rsplit_once('+')?;
    let module: Name = sanitize(module.as_bytes()).into();
    // Without a symbol the distance is that from the beginning of the file's own addresses.
    let name = if symbol.is_empty() { format!("+{offset}") } else { demangled(symbol) };
    Some(NativeFrame {
        frame: Frame { function: sanitize(name.as_bytes()).into(), file: module.clone(), line: None },
        module,
        symbol: sanitize(symbol.as_bytes()).into(),
        offset: hexadecimal(offset)?,
        address: hexadecimal(address)?,
        inlined: false,
    })
}

fn parse_python(text: &str) -> Option<Stack> {
    let mut lines = text.split('\n').flat_map(|line| line.split(FLAT)).peekable();
    let whose = match lines.next_if_eq(&VIA) {
        Some(_) => Whose::Via,
        None => Whose::Own,
    };
    let origins = Origins::default();
    let frames = lines.take(FRAMES_MOST).filter_map(frame).map(|frame| {
        let origin = match frame.line {
            Some(_) => origins.of_file(&frame.file),
            None => Origin::Standard,
        };
        (frame, origin)
    });
    Stack::new(frames.collect(), whose, false)
}

fn frame(line: &str) -> Option<Frame> {
    let (place, function) = line.rsplit_once("): ")?;
    let (file, number) = place.rsplit_once('(')?;
    let number: u32 = number.parse().ok()?;
    Some(Frame {
        function: sanitize(function.as_bytes()).into(),
        file: sanitize(file.as_bytes()).into(),
        line: (number > 0).then_some(number),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stack(whose: Whose) -> Stack {
        let frame = |file: &str, line, function: &str| {
            let frame = Frame { function: function.into(), file: file.into(), line };
            (frame, if line.is_some() { Origins::default().of_file(file) } else { Origin::Standard })
        };
        let frames = vec![
            frame("/usr/lib/python3.11/site-packages/torch/nn/m (1).py", Some(7), "M.f.<locals>.<lambda>"),
            frame("train.py", Some(12), "main"),
            frame("<code gone>", None, "<code gone>"),
        ];
        Stack::new(frames, whose, false).expect("frames")
    }

    #[test]
    fn what_is_written_is_read_back() {
        for whose in [Whose::Own, Whose::Via] {
            for style in [StackStyle::Lines, StackStyle::Flat] {
                let mut text = String::new();
                write(&mut text, &stack(whose), style, |out, line| out.push_str(line));
                assert_eq!(text.contains('\n'), style == StackStyle::Lines, "{text}");
                let read = parse(&text, "").expect("a stack");
                assert_eq!(read, stack(whose));
                assert_eq!(read.place().map(|frame| frame.line), Some(Some(12)));
            }
        }
        assert_eq!(parse("NA", "NA"), None);
        assert_eq!(parse("", ""), None);
    }

    #[test]
    fn native_functions_are_read_back() {
        let frame = |module: &str, symbol: &str, function: &str, inlined| NativeFrame {
            frame: Frame { function: function.into(), file: module.into(), line: None },
            module: module.into(),
            symbol: symbol.into(),
            offset: 0x44,
            address: 0x7f00_0000_1044,
            inlined,
        };
        let library = "/opt/x (1)/libmodel.so";
        let frames = vec![
            (frame("/usr/lib/libc.so.6", "fn_1000", "fn_1000", false), Origin::Standard),
            (frame(library, "_ZN1m3runEv", "inlined", true), Origin::User),
            (frame(library, "_ZN1m3runEv", "m::run()", false), Origin::User),
        ];
        for (cut, style) in [(false, StackStyle::Lines), (true, StackStyle::Flat)] {
            let native = Arc::new(NativeStack::new(frames.clone(), cut).expect("frames"));
            let (mut python, mut text) = (String::new(), String::new());
            let stack = Stack::with_native(None, native);
            write(&mut python, &stack, style, |out, line| out.push_str(line));
            write_native(&mut text, &stack, style, |out, line| out.push_str(line));
            assert_eq!(python, "");
            assert_eq!(text.contains('\n'), style == StackStyle::Lines, "{text}");
            let read = parse(&python, &text).expect("a stack");
            let native = read.native().expect("native frames");
            assert_eq!(native.is_cut(), cut);
            assert_eq!(native.frames(), [frames[0].0.clone(), frames[2].0.clone()]);
            assert_eq!(read.place().map(|frame| &*frame.function), Some("m::run()"));
        }
        let glibc = "/usr/lib/libc.so.6(+0x29d90) [0x7f0000029d90]";
        let read = parse("NA", glibc).expect("a stack");
        assert_eq!(read.place().map(|frame| &*frame.function), Some("+0x29d90"));
    }
}
