//! The column of Python stacks: a frame a line, `file(line): function`, innermost first, as msMemScope writes it.

use std::fmt::Write;

use crate::model::{Frame, Origin, Stack, Whose};
use crate::stacks::Origins;
use crate::text::sanitize;

/// Stands before the frames of the main thread, where that waited for the thread that allocated.
const VIA: &str = "via main:";

/// Joins the frames of a stack that is to stay on one line.
const FLAT: &str = " <- ";

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
    let separator = match style {
        StackStyle::Lines => "\n",
        StackStyle::Flat => FLAT,
    };
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

/// Reads a stack, of msMemScope as well; `None` where there is none.
pub(super) fn parse(text: &str) -> Option<Stack> {
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
                let read = parse(&text).expect("a stack");
                assert_eq!(read, stack(whose));
                assert_eq!(read.place().map(|frame| frame.line), Some(Some(12)));
            }
        }
        assert_eq!(parse("NA"), None);
        assert_eq!(parse(""), None);
    }
}
