//! Relinks minijinja's compiled instructions so that operators, containers, member access and printing go through
//! [`super::python`].
//!
//! minijinja leaves no hook for its operators, and its own have neither Python's results nor a bound on memory: a
//! doubling `x ~ x` ends in an out-of-memory kill. Each such instruction becomes a call of a filter whose name no
//! template can spell, and raw text is printed through the formatter, which pays for it. Knows the instruction set
//! (minijinja's `unstable_machinery`, hence the exact version in Cargo.toml) and nothing of conversations.

use minijinja::Value;
use minijinja::machinery::{Instruction, Instructions};

use super::TemplateError;
use super::python::adopt;

/// "Not cached": minijinja then looks the filter up by name.
const NO_LOCAL: u8 = !0;

/// Copies one instruction stream with its operators replaced.
///
/// # Errors
/// `Syntax` for a literal with more items than a call can take, `TooExpensive` for a constant that nests too deeply.
pub(super) fn relink<'s>(original: &Instructions<'s>) -> Result<Instructions<'s>, TemplateError> {
    let mut linked = Instructions::new(original.name(), original.source());
    let mut moved = Vec::new(); // new position of each old instruction
    let (mut at, mut next) = (0, 0);
    while let Some(instruction) = original.get(at) {
        moved.push(next);
        let line = original.get_line(at).unwrap_or(0);
        for replacement in replace(instruction, line)? {
            let added = match original.get_span(at) {
                Some(span) => linked.add_with_span(replacement, span),
                None => linked.add_with_line(replacement, u16::try_from(line).unwrap_or(u16::MAX)),
            };
            next = added + 1;
        }
        at += 1;
    }
    moved.push(next);
    retarget(&mut linked, &moved);
    Ok(linked)
}

/// Returns the instructions that replace one.
fn replace<'s>(instruction: &Instruction<'s>, line: usize) -> Result<Vec<Instruction<'s>>, TemplateError> {
    let text = |name: &str| Instruction::LoadConst(Value::from(name));
    Ok(match instruction {
        Instruction::EmitRaw(raw) => vec![text(raw), Instruction::Emit],
        Instruction::LoadConst(value) => {
            vec![Instruction::LoadConst(adopt(value).map_err(|error| {
                TemplateError::TooExpensive(format!("a constant in line {line}: {error}"))
            })?)]
        }
        Instruction::GetAttr(name) => vec![text(name), python("py:attr", 2)],
        Instruction::SetAttr(name) => vec![text(name), python("py:setattr", 3), Instruction::DiscardTop],
        Instruction::GetItem => vec![python("py:item", 2)],
        Instruction::Slice => vec![python("py:slice", 4)],
        Instruction::BuildList(None) => vec![Instruction::ApplyFilter("py:list", None, NO_LOCAL)],
        Instruction::BuildList(Some(count)) => vec![python("py:list", literal(*count, line)?)],
        Instruction::BuildTuple(None) => vec![Instruction::ApplyFilter("py:tuple", None, NO_LOCAL)],
        Instruction::BuildTuple(Some(count)) => vec![python("py:tuple", literal(*count, line)?)],
        Instruction::BuildMap(pairs) => vec![python("py:dict", literal(*pairs * 2, line)?)],
        Instruction::PushLoop(flags) => vec![python("py:iter", 1), Instruction::PushLoop(*flags)],
        Instruction::Neg => vec![python("py:neg", 1)],
        // The middle operand of `a < b < c` is compared by minijinja itself, so it has to be cheap.
        Instruction::CompareAndPreserve(op) => {
            vec![python("py:scalar", 1), Instruction::CompareAndPreserve(*op)]
        }
        // `loop.cycle()` without items divides by zero inside minijinja.
        Instruction::CallMethod("cycle", Some(1) | None) => {
            return Err(TemplateError::Syntax {
                line,
                message: "cycle() needs at least one item".to_owned(),
            });
        }
        Instruction::Include(_) | Instruction::LoadBlocks => vec![python("py:no_loader", 1)],
        other => vec![operator(other).map_or_else(|| other.clone(), |name| python(name, 2))],
    })
}

fn python<'s>(name: &'static str, args: u16) -> Instruction<'s> {
    Instruction::ApplyFilter(name, Some(args), NO_LOCAL)
}

fn literal(count: usize, line: usize) -> Result<u16, TemplateError> {
    u16::try_from(count).map_err(|_| TemplateError::Syntax {
        line,
        message: format!("a literal with {count} items is too long"),
    })
}

fn operator(instruction: &Instruction<'_>) -> Option<&'static str> {
    Some(match instruction {
        Instruction::Add => "py:add",
        Instruction::Sub => "py:sub",
        Instruction::Mul => "py:mul",
        Instruction::Div => "py:div",
        Instruction::IntDiv => "py:floordiv",
        Instruction::Rem => "py:rem",
        Instruction::Pow => "py:pow",
        Instruction::StringConcat => "py:concat",
        Instruction::Eq => "py:eq",
        Instruction::Ne => "py:ne",
        Instruction::Lt => "py:lt",
        Instruction::Lte => "py:le",
        Instruction::Gt => "py:gt",
        Instruction::Gte => "py:ge",
        Instruction::In => "py:in",
        _ => return None,
    })
}

fn retarget(linked: &mut Instructions<'_>, moved: &[u32]) {
    let mut at = 0;
    while let Some(instruction) = linked.get_mut(at) {
        match instruction {
            Instruction::Iterate(target)
            | Instruction::Jump(target)
            | Instruction::JumpIfFalse(target)
            | Instruction::JumpIfFalseOrPop(target)
            | Instruction::JumpIfTrueOrPop(target)
            | Instruction::BuildMacro(_, target, _) => {
                if let Some(new) = moved.get(*target as usize) {
                    *target = *new;
                }
            }
            _ => {}
        }
        at += 1;
    }
}
