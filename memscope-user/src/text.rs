//! Strings from a target are hostile input: made safe once, where they enter.

use std::borrow::Cow;

/// Turns bytes of the target into text that can go to a terminal, a CSV or JSON file: invalid UTF-8 becomes
/// U+FFFD; control characters (C0, DEL, C1), bidirectional overrides and line separators are written as `\u{..}`.
pub fn sanitize(bytes: &[u8]) -> Cow<'_, str> {
    let text = String::from_utf8_lossy(bytes);
    if !text.chars().any(is_unsafe) {
        return text;
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_unsafe(c) {
            out.extend(c.escape_unicode());
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::sanitize;

    #[test]
    fn plain_text_is_borrowed_and_escapes_are_spelled_out() {
        assert!(matches!(sanitize("aclnnAdd é 梯度".as_bytes()), std::borrow::Cow::Borrowed(_)));
        assert_eq!(sanitize(b"\x1b[2J\n"), "\\u{1b}[2J\\u{a}");
        assert_eq!(sanitize(b"a\xff"), "a\u{fffd}");
        assert_eq!(sanitize("x\u{202e}y".as_bytes()), "x\\u{202e}y");
    }
}
